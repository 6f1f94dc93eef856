"""A server of tools that an episode may ask: the store of ``examples/mcp_tools.py``.

python examples/mcp_server.py         # on standard input and output, as mcp_tools.py starts it
python examples/mcp_server.py 8000    # at http://127.0.0.1:8000/mcp
"""

import sys

from fastmcp import FastMCP

STOCK = {"bolts": 40, "nails": 75, "screws": 12}

server = FastMCP("store")


@server.tool
def stock(item: str) -> int:
    """How many pieces of an item are in store."""
    if item not in STOCK:
        raise ValueError(f"there is no {item!r} in store; there are {', '.join(STOCK)}")
    return STOCK[item]


if __name__ == "__main__":
    http = {"transport": "http", "host": "127.0.0.1", "port": int(sys.argv[1])} if sys.argv[1:] else {}
    server.run(show_banner=False, log_level="error", **http)
