from transformers.utils import logging

from optimum_neuronal.common.notes import get_logger


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
