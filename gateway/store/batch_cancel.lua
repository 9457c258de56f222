-- ARGV  id. Returns the batch as it is then, or nothing.

local id = ARGV[OWN_ARGUMENTS]
local status = redis.call('HGET', key('batch', id), 'status')

insist(TAG)
if status == 'validating' or status == 'in_progress' then
    move_batch(id, 'cancelling')
end
return show_batch(id)
