# What `cmake --install` leaves: headers, library, program, and the two ways to find them (find_package, pkg-config).
include(CMakePackageConfigHelpers)
set(config_dir "${CMAKE_INSTALL_LIBDIR}/cmake/tfla")
set(pkgconfig_dir "${CMAKE_INSTALL_LIBDIR}/pkgconfig")

install(TARGETS tfla EXPORT tflaTargets)
install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/tfla" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
if(TFLA_BUILD_CLI)
  install(TARGETS tfla_cli)
endif()

# A static libtfla.a leaves its dependencies to whoever links it; a shared one has settled them.
if(BUILD_SHARED_LIBS)
  set(TFLA_NEEDS_DEPENDENCIES OFF)
else()
  set(TFLA_NEEDS_DEPENDENCIES ON)
endif()

install(EXPORT tflaTargets NAMESPACE tfla:: DESTINATION "${config_dir}")
configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/tflaConfig.cmake.in" "${PROJECT_BINARY_DIR}/tflaConfig.cmake"
                              INSTALL_DESTINATION "${config_dir}")
write_basic_package_version_file("${PROJECT_BINARY_DIR}/tflaConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/tflaConfig.cmake" "${PROJECT_BINARY_DIR}/tflaConfigVersion.cmake"
        DESTINATION "${config_dir}")

# Relative to the .pc file, so that `cmake --install --prefix` may choose another prefix than configuration did.
file(RELATIVE_PATH TFLA_PC_PREFIX "/${pkgconfig_dir}" "/")
string(REGEX REPLACE "/$" "" TFLA_PC_PREFIX "${TFLA_PC_PREFIX}")
set(TFLA_PC_REQUIRES "")
set(TFLA_PC_LIBS "")
if(TFLA_NEEDS_DEPENDENCIES)
  set(TFLA_PC_REQUIRES "libhwy")
  if(TFLA_CUDA)
    string(APPEND TFLA_PC_LIBS " ${CUDA_cudart_static_LIBRARY} -ldl -lrt")
  endif()
  foreach(name IN LISTS OpenMP_CXX_LIB_NAMES)
    string(APPEND TFLA_PC_LIBS " -l${name}")
  endforeach()
  foreach(name IN LISTS CMAKE_CXX_IMPLICIT_LINK_LIBRARIES)  # a linker that is called for C does not add it
    if(name MATCHES "^(std)?c\\+\\+$")
      string(APPEND TFLA_PC_LIBS " -l${name}")
    endif()
  endforeach()
  string(APPEND TFLA_PC_LIBS " -lm")
endif()
configure_file("${PROJECT_SOURCE_DIR}/cmake/tfla.pc.in" "${PROJECT_BINARY_DIR}/tfla.pc" @ONLY)
install(FILES "${PROJECT_BINARY_DIR}/tfla.pc" DESTINATION "${pkgconfig_dir}")
