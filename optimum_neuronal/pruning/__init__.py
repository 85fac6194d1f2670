"""One prune, from a config to what becomes of every weight; nothing here changes one."""
