"""Text and token ids: any dataset as documents, and seeded calibration sequences drawn from them."""
