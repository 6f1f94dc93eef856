"""Text environments beyond GEM, each behind an entry point: :mod:`.textworld`, :mod:`.openenv`,
:mod:`.textarena`; and the tools of :mod:`.mcp`.

A module here is imported when the first id of its family is resolved, and the package that it needs
is imported then.
"""
