-- ARGV  ids. Returns those batches that there are.

local found = {}
for i = OWN_ARGUMENTS, #ARGV do
    found[#found + 1] = show_batch(ARGV[i]) or nil
end
return found
