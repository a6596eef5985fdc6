"""`rootstock launch`: agents.py is the table of agents, setups.py what each needs to use a server;
process.py starts one.
"""
