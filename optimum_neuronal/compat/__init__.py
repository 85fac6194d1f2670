"""The private names of transformers, accelerate, torch and PEFT that this package uses."""
