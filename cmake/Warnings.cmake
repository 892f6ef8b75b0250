# tfla_warnings(target): the warnings every target of this project is clean under.
function(tfla_warnings target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wpedantic -Wshadow -Wcast-qual -Wnon-virtual-dtor)
  if(TFLA_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
endfunction()
