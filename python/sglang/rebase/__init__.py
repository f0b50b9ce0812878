"""What a rebase onto another version of upstream SGLang has to look at: `python -m sglang.rebase OLD NEW`.

For people who fork or maintain this engine. It lies in the package because it asks the server's own tables what is
served and what is refused. Nothing of the server imports it.
"""
