//! libibverbs, loaded when it is first used.

use super::RdmaError;
use super::abi::{
    ibv_comp_channel, ibv_context, ibv_cq, ibv_device, ibv_device_attr, ibv_gid_entry, ibv_mr,
    ibv_pd, ibv_port_attr, ibv_qp, ibv_qp_attr, ibv_qp_init_attr, ibv_wc_status,
};
use libc::{c_int, c_uint, c_void};
use std::ffi::CStr;
use std::ptr::NonNull;
use std::sync::OnceLock;

/// Declares the functions that are used, as `infiniband/verbs.h` does, and how to load them.
macro_rules! functions {
    ($($name:ident($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions of the library. Those that work on a context, and are called more often,
        /// are in the context itself.
        pub(crate) struct Library {
            $(pub(crate) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Library {
            fn open() -> Option<Self> {
                let handle = open()?;
                Some(Self {
                    $($name: {
                        let address = find(handle, concat!(stringify!($name), "\0"))?;
                        // SAFETY: the library's function of this name has this type, in every
                        // library of this number: its interface is versioned.
                        unsafe {
                            std::mem::transmute::<
                                *mut c_void,
                                unsafe extern "C" fn($($argument),*) $(-> $result)?,
                            >(address.as_ptr())
                        }
                    },)*
                })
            }
        }
    };
}

/// Loads the library. It is never closed again, so that its functions stay.
fn open() -> Option<NonNull<c_void>> {
    // SAFETY: the name is a C string. What the library does when it is loaded is its own.
    NonNull::new(unsafe { libc::dlopen(c"libibverbs.so.1".as_ptr(), libc::RTLD_NOW) })
}

/// The function of a name, which ends with a zero byte.
fn find(library: NonNull<c_void>, name: &str) -> Option<NonNull<c_void>> {
    let name = CStr::from_bytes_with_nul(name.as_bytes()).ok()?;
    // SAFETY: the library is open, and the name a C string.
    NonNull::new(unsafe { libc::dlsym(library.as_ptr(), name.as_ptr()) })
}

functions! {
    ibv_get_device_list(*mut c_int) -> *mut *mut ibv_device;
    ibv_free_device_list(*mut *mut ibv_device);
    ibv_open_device(*mut ibv_device) -> *mut ibv_context;
    ibv_close_device(*mut ibv_context) -> c_int;
    ibv_query_device(*mut ibv_context, *mut ibv_device_attr) -> c_int;
    // It fills the part of the structure that older programs know; the rest stays as it is.
    ibv_query_port(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int;
    _ibv_query_gid_table(*mut ibv_context, *mut ibv_gid_entry, usize, u32, usize) -> isize;
    ibv_alloc_pd(*mut ibv_context) -> *mut ibv_pd;
    ibv_dealloc_pd(*mut ibv_pd) -> c_int;
    ibv_reg_mr(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
    ibv_dereg_mr(*mut ibv_mr) -> c_int;
    ibv_create_comp_channel(*mut ibv_context) -> *mut ibv_comp_channel;
    ibv_destroy_comp_channel(*mut ibv_comp_channel) -> c_int;
    ibv_create_cq(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
    ibv_destroy_cq(*mut ibv_cq) -> c_int;
    ibv_get_cq_event(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int;
    ibv_ack_cq_events(*mut ibv_cq, c_uint);
    ibv_create_qp(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
    ibv_modify_qp(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
    ibv_destroy_qp(*mut ibv_qp) -> c_int;
    ibv_wc_status_str(ibv_wc_status::Type) -> *const libc::c_char;
}

static LIBRARY: OnceLock<Option<Library>> = OnceLock::new();

impl Library {
    /// The library, loaded now if it was not.
    pub(crate) fn load() -> Result<&'static Self, RdmaError> {
        let library = LIBRARY.get_or_init(Self::open);
        library.as_ref().ok_or(RdmaError::NoLibrary)
    }
}

/// The library of what is open already.
pub(crate) fn verbs() -> &'static Library {
    Library::load().expect("a device was opened with it")
}
