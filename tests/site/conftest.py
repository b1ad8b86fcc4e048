"A browser for the tests of pages."
import pytest

from test_site import Browser


@pytest.fixture
def browser(tmp_path_factory):
    tab = Browser(tmp_path_factory.mktemp("chromium"))
    yield tab
    tab.close()
