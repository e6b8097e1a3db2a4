"""What an answer must be: a JSON value of a schema, a text of a regular expression or a grammar.

`constraint` has the types and the bounds that every part checks, `schema` what is done to a JSON
schema before it is compiled, `grammar` the compiling itself, which only workers do.
"""
