"""Alembic migrations of the store's schema; ``diffserve.store.migration`` runs them."""
