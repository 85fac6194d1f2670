import pytest


@pytest.fixture
def said(monkeypatch) -> list[str]:
    """Warnings about Hessians, as they come."""
    messages = []
    monkeypatch.setattr("optimum_neuronal.saliency.base.logger.warning", messages.append)
    return messages
