"""``diffserve batch``: a file of requests, a folder of pictures; a second run paints what is missing."""
