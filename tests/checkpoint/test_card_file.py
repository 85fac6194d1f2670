import pytest

from optimum_neuronal.checkpoint.card_file import changed, is_unedited, name_for_card, seal


CARD = "---\ntags: [sparse]\n---\n\n# llama\n"


def test_a_sealed_card_is_known_until_it_is_edited():
    sealed = seal(CARD)
    assert sealed.startswith(CARD) and is_unedited(sealed)
    assert is_unedited(sealed.replace("\n", "\r\n")), "as git writes it on Windows"
    assert not is_unedited(sealed.replace("llama", "alpaca")) and not is_unedited(CARD) and not is_unedited("")
    assert not is_unedited(sealed + "and more\n")


def test_what_is_changed_stays_sealed_only_if_it_was_unedited():
    text = changed(seal(CARD), lambda text: text.replace("llama", "alpaca"))
    assert text == seal(CARD.replace("llama", "alpaca"))
    edited = seal(CARD) + "mine\n"
    assert changed(edited, str.upper) == edited.upper()


def test_a_place_for_a_card(tmp_path):
    assert name_for_card(tmp_path) == "README.md"
    (tmp_path / "README.md").write_text(seal(CARD))
    assert name_for_card(tmp_path) == "README.md"
    (tmp_path / "README.md").write_bytes(b"\xff not UTF-8")
    assert name_for_card(tmp_path) == "MODEL_CARD.md"
    (tmp_path / "MODEL_CARD.md").write_text(CARD)
    with pytest.raises(FileExistsError, match="both edited or of another make: rename one"):
        name_for_card(tmp_path)
