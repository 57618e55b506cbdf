"""``diffserve batch``: generate images for a file of requests; a second run generates what is missing."""
