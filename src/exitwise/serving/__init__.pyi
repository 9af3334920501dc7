from exitwise.serving.application import app as app
from exitwise.serving.security import ApiKeys as ApiKeys
from exitwise.serving.settings import Settings as Settings
