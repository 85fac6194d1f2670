import pytest
from conftest import make_model
from huggingface_hub import HfApi, ModelCardData
from huggingface_hub.hf_api import ModelInfo

from optimum_neuronal.checkpoint import card_metadata
from optimum_neuronal.checkpoint.card_metadata import inherited_metadata, make_metadata


CARD = "---\nlicense: {license}\nlanguage:\n- en\n- 'no'\ndatasets: [c4]\ntags: [mine]\n{more}---\n# Dense\n"


@pytest.fixture(scope="module")
def model():
    return make_model("llama")


@pytest.fixture
def beside(model, tmp_path):
    """Writes the card of the directory that the model came from."""
    model.config._name_or_path = str(tmp_path)
    return lambda text: (tmp_path / "README.md").write_text(text)


@pytest.fixture
def on_the_hub(model, monkeypatch):
    """The model came from the Hub, which answers so."""
    model.config._name_or_path = "meta/llama"

    def answer(answer):
        def model_info(self, repo_id, timeout):
            assert (repo_id, timeout) == ("meta/llama", card_metadata.TIMEOUT)
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(HfApi, "model_info", model_info)

    return answer


def test_of_a_directory(model, beside):
    beside(CARD.format(license="llama3", more="license_link: LICENSE\nlicense_name: [{}]\n"))
    assert inherited_metadata(model) == {"license": "llama3", "language": ["en", "no"], "datasets": ["c4"]}


def test_of_the_hub(model, on_the_hub):
    data = ModelCardData(license="other", license_name="own", license_link="LICENSE", language="en", tags=["x"])
    info = ModelInfo(id="meta/llama", cardData=data.to_dict())
    on_the_hub(info)
    link = "https://huggingface.co/meta/llama/blob/main/LICENSE"
    expected = {"license": "other", "license_name": "own", "license_link": link, "language": "en"}
    assert inherited_metadata(model) == expected
    info.card_data.license_link = "https://elsewhere.org/licence"
    assert inherited_metadata(model)["license_link"] == "https://elsewhere.org/licence"
    info.card_data = None
    assert inherited_metadata(model) == {}


@pytest.mark.parametrize("error", [OSError("no network"), ValueError("not found"), RuntimeError("anything")])
def test_nobody_who_can_be_asked(model, on_the_hub, error):
    on_the_hub(error)
    assert inherited_metadata(model) == {}


@pytest.mark.parametrize(
    "text", ["", "# No metadata\n", "---\n[\n---\n", "---\njust text\n---\n", "---\nlicense: 3\n---\n"]
)
def test_cards_that_tell_nothing(model, beside, text):
    beside(text)
    assert inherited_metadata(model) == {}


def test_a_directory_asks_nobody(model, beside, on_the_hub, tmp_path):
    model.config._name_or_path = str(tmp_path)
    on_the_hub(AssertionError("asked"))
    assert inherited_metadata(model) == {}


def test_links_and_huge_files_are_not_read(model, beside, tmp_path, monkeypatch):
    beside(CARD.format(license="mit", more=""))
    monkeypatch.setattr(card_metadata, "LARGEST", 10)
    assert inherited_metadata(model) == {}
    monkeypatch.undo()
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "README.md").symlink_to(tmp_path / "README.md")
    model.config._name_or_path = str(tmp_path / "own")
    assert inherited_metadata(model) == {}


def test_it_is_metadata_of_the_pruned_model(model, beside):
    from test_report import report

    beside(CARD.format(license="apache-2.0", more=""))
    data = make_metadata(model, report(), "llama-70")
    assert (data.license, data.language, data.datasets) == ("apache-2.0", ["en", "no"], ["c4"])
    assert data.tags == ["sparse", "pruned", "optimum_neuronal"], "its tags are its own"
