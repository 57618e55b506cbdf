"""The engine on many machines: replicas in a Ray Serve application behind the front that ``serve`` has, too."""
