"""The engine process, seen from asyncio."""
