"""Text and token ids: datasets of any kind as documents, and seeded calibration sequences of them."""
