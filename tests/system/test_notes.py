from transformers.utils import logging

from optimum_neuronal.system.notes import get_logger


def test_transformers_verbosity_governs_notes(caplog):
    logger, before = get_logger("optimum_neuronal.sample"), logging.get_verbosity()
    try:
        logging.set_verbosity_error()
        logger.warning("silenced")
        logging.set_verbosity_info()
        logger.info("told")
    finally:
        logging.set_verbosity(before)
    assert [record.getMessage() for record in caplog.records] == ["told"]


def test_no_module_has_a_logger_of_its_own():
    """One that is not below transformers' would ignore `TRANSFORMERS_VERBOSITY`."""
    from pathlib import Path

    import optimum_neuronal

    sources = Path(optimum_neuronal.__file__).parent.rglob("*.py")
    assert [p.name for p in sources if "logging.get_logger(" in p.read_text(encoding="utf-8")] == ["notes.py"]
