"""Asyncio clients of the engine processes."""
