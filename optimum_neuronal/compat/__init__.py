"""The private names of transformers, PEFT and accelerate that this package uses, one module for each library."""
