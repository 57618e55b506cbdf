"""Experiments whose images the engines of a server generate, in a process of their own.

    server  <-- socket pair -->  process: generates through the server, measures, stores, writes the report

The process survives nothing: its store resumes from the records on disk, so it is started again after a restart.
"""
