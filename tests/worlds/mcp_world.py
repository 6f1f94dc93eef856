"""A server of tools that can fail in every way: ``python mcp_world.py [PORT]``."""

from __future__ import annotations

import itertools
import os
import sys
import time

from fastmcp import FastMCP

server = FastMCP("world")
calls = itertools.count(1)


@server.tool
def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


@server.tool
def count() -> str:
    """The number of this call, and the process."""
    return f"{next(calls)} {os.getpid()}"


@server.tool
def fail() -> str:
    """Raise."""
    raise ValueError("out of stock")


@server.tool
def hang() -> str:
    """Do not answer."""
    time.sleep(600)
    return ""


@server.tool
def die() -> str:
    """End the process."""
    os._exit(1)


if __name__ == "__main__":
    http = {"transport": "http", "host": "127.0.0.1", "port": int(sys.argv[1])} if sys.argv[1:] else {}
    server.run(show_banner=False, log_level="critical", **http)
