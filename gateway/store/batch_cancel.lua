-- ARGV  id. Returns the batch as it is then, or nothing.

local id = ARGV[OWN_ARGUMENTS]

insist(TAG)
cancel_batch(id)
return show_batch(id)
