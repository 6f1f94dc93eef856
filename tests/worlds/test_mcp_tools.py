"""What :class:`MCPTools` refuses before there is a server; ``tests/worlds/test_mcp.py`` has the
rest."""

from __future__ import annotations

import sys

import pytest

from torchrl_llm.utils.optional import MissingExtraError
from torchrl_llm.utils.options import ConfigError
from torchrl_llm.worlds.mcp import MCPTools


@pytest.mark.parametrize("server", ["localhost:8000", "", {}, {"mcpServers": {}}, {"args": ["server.py"]}, None])
def test_what_names_no_server(server):
    with pytest.raises(ConfigError, match="expected an address, such as"):
        MCPTools(server)


@pytest.mark.parametrize("timeout", [0, -1.0])
def test_a_timeout_that_is_none(timeout):
    with pytest.raises(ConfigError, match="expected seconds, more than 0"):
        MCPTools("http://127.0.0.1:8000/mcp", timeout=timeout)


def test_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "fastmcp", None)
    with pytest.raises(MissingExtraError, match=r"needs 'fastmcp': pip install 'torchrl-llm\[mcp\]'"):
        MCPTools("http://127.0.0.1:8000/mcp")
