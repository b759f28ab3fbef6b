"""SQS and servers that speak its protocol, through aiobotocore. Only this folder imports that driver.

`sqs_session` polls and settles, `sqs_client` connects and reports what a queue's attributes would lose.
"""
