"""Texts of known words, for the tests of calibration data."""

from optimum_neuronal.data.calibration import draw_windows


VOCAB = 256


def document(start, length):
    return " ".join(f"w{(start + i) % (VOCAB - 1)}" for i in range(length))


def draw(dataset, tokenizer, num_samples=4, seq_length=8, seed=0, vocab_size=VOCAB, **how):
    sizes = {"num_samples": num_samples, "seq_length": seq_length, "seed": seed, "vocab_size": vocab_size}
    return draw_windows(dataset, tokenizer, **sizes, **how)


# Documents of 3 words ("short") lie between those of 20 words, which start at multiples of 20.
MIXED = [text for i in range(10) for text in (document(20 * i, 20), document(0, 3), "  ")]
