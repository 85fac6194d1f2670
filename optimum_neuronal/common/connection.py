"""Whether the Hub can be reached."""

from huggingface_hub import constants, get_session, is_offline_mode
from huggingface_hub.errors import HfHubHTTPError


TIMEOUT = 10  # seconds that the Hub may take to answer
HTTPError = HfHubHTTPError.__bases__[0]  # of httpx, or of httpx2 in later releases: no connection, a timeout


def is_connected() -> bool:
    """Return False if the Hub does not answer, True if it does or in offline mode, which asks nothing."""
    if not is_offline_mode():
        try:
            get_session().head(constants.ENDPOINT, timeout=TIMEOUT)
        except HTTPError:
            return False
    return True
