"""Tables, quantities and escaped text for terminals, Markdown and notebooks.

This room imports no other room.
"""
