"""The demonstration, and the small model that comes with the package."""
