"""The demonstration, and the small trained model and texts that come with the package."""
