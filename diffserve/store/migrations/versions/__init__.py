"""One module for each revision of the schema. Never change a released one."""
