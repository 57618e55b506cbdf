"""From what lies on disk to networks on a device: directories, single files, manifests, adapters."""
