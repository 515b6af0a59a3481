//! libibverbs, loaded at its first use.

use super::RdmaError;
use super::abi::{
    _compat_ibv_port_attr, ibv_comp_channel, ibv_context, ibv_cq, ibv_device, ibv_device_attr,
    ibv_device_attr_ex, ibv_gid_entry, ibv_mr, ibv_odp_caps, ibv_pd, ibv_qp, ibv_qp_attr,
    ibv_qp_init_attr, ibv_wc_status, verbs_context,
};
use libc::{c_int, c_uint, c_void};
use std::ffi::{CStr, CString};
use std::mem::{offset_of, zeroed};
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::OnceLock;

/// Declares the functions to load. The types of those that rdma-sys declares are compared with its
/// declarations, which does not link them.
macro_rules! functions {
    (
        compared { $($name:ident($($argument:ty),*) $(-> $result:ty)?;)* }
        others { $($other:ident($($other_argument:ty),*) -> $other_result:ty;)* }
    ) => {
        /// The functions of the library. The context itself contains those that operate on a
        /// context and are called more often.
        pub(crate) struct Library {
            $(pub(crate) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
            $(pub(crate) $other: unsafe extern "C" fn($($other_argument),*) -> $other_result,)*
        }

        $(const _: unsafe extern "C" fn($($argument),*) $(-> $result)? = rdma_sys::$name;)*

        impl Library {
            fn open() -> Result<Self, Missing> {
                let handle = open()?;
                // SAFETY: the library's function of each name has the type of its field in every
                // library of this soname, since its interface is versioned. All are pointers.
                unsafe {
                    Ok(Self {
                        $($name: std::mem::transmute::<
                            *mut c_void,
                            unsafe extern "C" fn($($argument),*) $(-> $result)?,
                        >(find(handle, stringify!($name))?.as_ptr()),)*
                        $($other: std::mem::transmute::<
                            *mut c_void,
                            unsafe extern "C" fn($($other_argument),*) -> $other_result,
                        >(find(handle, stringify!($other))?.as_ptr()),)*
                    })
                }
            }
        }
    };
}

/// What is missing.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Missing {
    Library,
    Function(&'static str),
}

impl Missing {
    fn error(self) -> RdmaError {
        match self {
            Self::Library => RdmaError::NoLibrary,
            Self::Function(name) => RdmaError::NoFunction(name),
        }
    }
}

/// Loads the library. It is never closed, so its functions stay valid.
fn open() -> Result<NonNull<c_void>, Missing> {
    // SAFETY: the name is a C string. The library's own constructors are trusted.
    let library = unsafe { libc::dlopen(c"libibverbs.so.1".as_ptr(), libc::RTLD_NOW) };
    NonNull::new(library).ok_or(Missing::Library)
}

/// Returns the function with this name.
fn find(library: NonNull<c_void>, name: &'static str) -> Result<NonNull<c_void>, Missing> {
    let missing = Missing::Function(name);
    let name = CString::new(name).map_err(|_| missing)?;
    // SAFETY: the library is open, and the name is a C string.
    let function = unsafe { libc::dlsym(library.as_ptr(), name.as_ptr()) };
    NonNull::new(function).ok_or(missing)
}

functions! {
    compared {
        ibv_get_device_list(*mut c_int) -> *mut *mut ibv_device;
        ibv_free_device_list(*mut *mut ibv_device);
        ibv_open_device(*mut ibv_device) -> *mut ibv_context;
        ibv_close_device(*mut ibv_context) -> c_int;
        ibv_query_device(*mut ibv_context, *mut ibv_device_attr) -> c_int;
        // It fills the part of the structure that older programs have; the rest stays unchanged.
        ibv_query_port(*mut ibv_context, u8, *mut _compat_ibv_port_attr) -> c_int;
        // The key is in network byte order.
        ibv_query_pkey(*mut ibv_context, u8, c_int, *mut u16) -> c_int;
        ibv_alloc_pd(*mut ibv_context) -> *mut ibv_pd;
        ibv_dealloc_pd(*mut ibv_pd) -> c_int;
        ibv_reg_mr_iova2(*mut ibv_pd, *mut c_void, usize, u64, c_uint) -> *mut ibv_mr;
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
    others {
        // The header declares it for an inline function, which bindgen omits. A test compares the
        // types.
        _ibv_query_gid_table(*mut ibv_context, *mut ibv_gid_entry, usize, u32, usize) -> isize;
    }
}

static LIBRARY: OnceLock<Result<Library, Missing>> = OnceLock::new();

impl Library {
    /// Returns the library, which is loaded at the first call.
    pub(crate) fn load() -> Result<&'static Self, RdmaError> {
        let library = LIBRARY.get_or_init(Self::open);
        library.as_ref().map_err(|missing| missing.error())
    }
}

/// Returns the file of the loaded library, without symbolic links: its name ends with its version,
/// such as `libibverbs.so.1.14.44.0` of rdma-core 44.
///
/// # Errors
///
/// Fails when the library is missing.
pub fn library_file() -> Result<PathBuf, RdmaError> {
    let library = Library::load()?;
    // SAFETY: a structure of numbers and pointers, for which zero is a valid value.
    let mut found: libc::Dl_info = unsafe { zeroed() };
    // SAFETY: the address is only compared, and the structure is ours.
    let known =
        unsafe { libc::dladdr(library.ibv_get_device_list as *const c_void, &raw mut found) };
    if known == 0 || found.dli_fname.is_null() {
        return Err(RdmaError::NoLibrary);
    }
    // SAFETY: a zero-terminated name, valid while the library is loaded, which is for ever.
    let name = unsafe { CStr::from_ptr(found.dli_fname) };
    let file = PathBuf::from(name.to_string_lossy().into_owned());
    Ok(file.canonicalize().unwrap_or(file))
}

/// Returns the library that an open device has already loaded.
pub(crate) fn verbs() -> &'static Library {
    Library::load().expect("a device was opened with it")
}

/// Queries what a device offers of on-demand paging, through a function pointer in the open device,
/// since libibverbs exports no function for it. `None` if the library or the device has none.
///
/// # Safety
///
/// The device must be open.
pub(crate) unsafe fn query_on_demand(context: *mut ibv_context) -> Option<ibv_odp_caps> {
    // SAFETY: the device is open. The rest follows `verbs_get_ctx_op` of `infiniband/verbs.h`: a
    // device with the marker in this field is the last part of a larger structure, which contains
    // its own size; older libraries have one without the first fields. rdma-sys has this function
    // too, but compares the field with a 32-bit number.
    unsafe {
        if (*context).abi_compat.addr() != usize::MAX {
            return None;
        }
        let before = offset_of!(verbs_context, context);
        let extended: *mut verbs_context = context.byte_sub(before).cast();
        let from_query = size_of::<verbs_context>() - offset_of!(verbs_context, query_device_ex);
        if (*extended).sz < from_query {
            return None;
        }
        let query = (*extended).query_device_ex?;
        // Numbers, for which zero is a valid value.
        let mut attributes: ibv_device_attr_ex = zeroed();
        let bytes = size_of_val(&attributes);
        let result = query(context, std::ptr::null(), &raw mut attributes, bytes);
        (result == 0).then_some(attributes.odp_caps)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_of_the_library_has_a_version() {
        let Ok(file) = library_file() else {
            println!("SKIPPED: no libibverbs.so.1");
            return;
        };
        let name = file.file_name().expect("a file").to_string_lossy();
        let version = name.strip_prefix("libibverbs.so.1.").expect("a version");
        assert!(version.starts_with(|c: char| c.is_ascii_digit()), "{name}");
    }

    #[test]
    fn a_function_that_is_missing_is_named() {
        let Ok(library) = open() else {
            println!("SKIPPED: no libibverbs.so.1");
            return;
        };
        assert!(find(library, "ibv_open_device").is_ok());
        let missing = find(library, "ibv_of_a_later_version").expect_err("it is not there");
        let text = missing.error().to_string();
        assert!(text.contains("ibv_of_a_later_version"), "{text}");
        assert_ne!(text, Missing::Library.error().to_string());
    }
}
