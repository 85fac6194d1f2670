"""Text and token ids: datasets of any kind as documents, and seeded calibration sequences drawn from them.

Pruning draws its calibration sequences here, evaluation its test text, training the sequences that it prunes with.
It may know tokenizers and the `datasets` library, but no model beyond its config, no plan and no method; it imports
no other room.
"""
