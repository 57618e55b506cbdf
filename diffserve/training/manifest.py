"""``python -m diffserve.training.manifest`` rewrites the manifests of all shipped weights after an intended change."""

from __future__ import annotations

from diffserve.runtime.loading.checkpoint import write_manifest
from diffserve.training.card import SHIPPED


def main() -> None:
    """Write a manifest for each directory of weights, and print its path."""
    for place in SHIPPED.values():
        if place.is_dir():
            print(write_manifest(place))


if __name__ == "__main__":
    main()
