"""``python -m diffserve.training.manifest`` writes the manifests of all shipped weights anew, after a wanted change."""

from __future__ import annotations

from diffserve.runtime.loading.checkpoint import write_manifest
from diffserve.training.card import SHIPPED


def main() -> None:
    """Write one for each directory of weights, and say where."""
    for place in SHIPPED.values():
        if place.is_dir():
            print(write_manifest(place))


if __name__ == "__main__":
    main()
