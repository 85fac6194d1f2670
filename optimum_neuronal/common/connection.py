"""Whether the Hub can be reached."""

import time
from contextlib import suppress
from functools import lru_cache

from huggingface_hub import constants, get_session, is_offline_mode
from huggingface_hub.errors import HfHubHTTPError


TIMEOUT = 10  # seconds that the Hub may take to answer
HTTPError = HfHubHTTPError.__bases__[0]  # of httpx, or of httpx2 in later releases: no connection, a timeout


def check_connection() -> None:
    """Raise `ConnectionError` if the Hub does not answer. huggingface_hub itself would retry for half a minute first.

    Offline mode (`HF_HUB_OFFLINE=1`) asks nothing, so this raises nothing.
    """
    if is_offline_mode():
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=TIMEOUT)
    except HTTPError as error:
        raise ConnectionError(
            f"{constants.ENDPOINT} cannot be reached: {error or type(error).__name__}. Check the network, or set "
            "HF_HUB_OFFLINE=1 to use what was downloaded before."
        ) from error


def is_connected() -> bool:
    """Return True if the Hub answers, False without a connection and in offline mode. It is asked once a minute at most."""
    return not is_offline_mode() and _answers(constants.ENDPOINT, int(time.monotonic() // 60))


@lru_cache(maxsize=1)
def _answers(endpoint: str, minute: int) -> bool:
    with suppress(ConnectionError):
        check_connection()
        return True
    return False
