# OpenBLAS as a static archive, so that the program runs where there is none.
# Target: OpenBLAS::OpenBLAS. Only Debian's pthread flavour is looked for: its serial flavour gives wrong products when
# two threads call it at once. For another OpenBLAS that is safe to call from many threads, set the two variables.
find_library(OpenBLAS_ARCHIVE NAMES openblas-pthread/libopenblas.a
             DOC "libopenblas.a, safe to call from several threads")
find_path(OpenBLAS_INCLUDE_DIR NAMES cblas.h PATH_SUFFIXES openblas-pthread NO_DEFAULT_PATH
          PATHS /usr/include/${CMAKE_LIBRARY_ARCHITECTURE} /usr/include
          DOC "Directory of the cblas.h that belongs to OpenBLAS_ARCHIVE")
mark_as_advanced(OpenBLAS_ARCHIVE OpenBLAS_INCLUDE_DIR)

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  OpenBLAS
  REQUIRED_VARS OpenBLAS_ARCHIVE OpenBLAS_INCLUDE_DIR
  REASON_FAILURE_MESSAGE
    "tfla bench --gemm needs it: the Debian package libopenblas-pthread-dev, or OpenBLAS_ARCHIVE and OpenBLAS_INCLUDE_DIR.")

if(OpenBLAS_FOUND AND NOT TARGET OpenBLAS::OpenBLAS)
  find_package(Threads REQUIRED)
  add_library(OpenBLAS::OpenBLAS STATIC IMPORTED)
  set_target_properties(
    OpenBLAS::OpenBLAS
    PROPERTIES IMPORTED_LOCATION "${OpenBLAS_ARCHIVE}"
               INTERFACE_INCLUDE_DIRECTORIES "${OpenBLAS_INCLUDE_DIR}"
               INTERFACE_LINK_LIBRARIES "Threads::Threads;m")
endif()
