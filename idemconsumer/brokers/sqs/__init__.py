"""SQS and what speaks its protocol, through aiobotocore. The only room that imports that driver.

`session` polls and settles, `client` connects and reports what a queue's attributes would lose.
"""
