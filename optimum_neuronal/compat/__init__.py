"""Every private name of transformers, PEFT and accelerate that this package uses, one module for each library.

A release that changes a private name is answered here. This room imports nothing of the package.
"""
