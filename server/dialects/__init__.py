"""The APIs that clients speak, a package each.

`schema` has the JSON, `read` makes requests of bodies, `write` makes bytes of events, `routes` has
the URLs. No dialect imports another one. What they share is in the modules here, which import the
service, generation and the layers below them.
"""
