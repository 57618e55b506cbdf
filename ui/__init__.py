"""The page in the browser. It arrives in a later release; this version ships the package's place and nothing to import.

The page is the roof of the house: it will talk to a running server over HTTP, like any other client, and will never
import the engine, the runtime or torch. Until then use ``diffserve generate``, the Python API or the HTTP endpoints.
"""

__all__: list[str] = []
