"""Text and token ids: any dataset as documents, and seeded calibration sequences drawn from them.

Pruning draws its calibration sequences here, evaluation its test text, training the sequences that it prunes with.
This room knows tokenizers and the `datasets` library, of a model only its config; it imports no other room.
"""
