"""Whether the Hub can be reached."""

import time
from functools import lru_cache

from huggingface_hub import constants, get_session, is_offline_mode
from huggingface_hub.errors import HfHubHTTPError


TIMEOUT = 10  # seconds that the Hub may take to answer
HTTPError = HfHubHTTPError.__bases__[0]  # of httpx, or of httpx2 in later releases: no connection, a timeout


def is_connected() -> bool:
    """Return True if the Hub answers, False without a connection and in offline mode. It is asked once a minute at most.

    huggingface_hub itself would retry for half a minute first.
    """
    return not is_offline_mode() and _answers(constants.ENDPOINT, int(time.monotonic() // 60))


@lru_cache(maxsize=1)
def _answers(endpoint: str, minute: int) -> bool:
    try:
        get_session().head(endpoint, timeout=TIMEOUT)
    except HTTPError:
        return False
    return True
