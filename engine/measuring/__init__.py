"""`rootstock doctor --measure`: measurements in processes of their own, within a time.

`measure.py` is the server's door to it. What is measured on the device alone is in
`mlx_backend/measuring/`, what takes a whole engine is here.
"""
