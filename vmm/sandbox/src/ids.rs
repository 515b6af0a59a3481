//! The user and the groups of this process. The C library changes those of all threads; the system
//! calls would change those of one.

use std::io;

use nix::unistd::{Gid, Uid, getgroups, getresgid, getresuid, setgroups, setresgid, setresuid};

/// An id that stays as it is.
const KEEP: u32 = u32::MAX;

/// Leaves all supplementary groups.
pub(crate) fn leave_groups() -> io::Result<()> {
    Ok(setgroups(&[])?)
}

/// Makes `gid` the group: real, effective and saved.
pub(crate) fn change_group(gid: u32) -> io::Result<()> {
    let gid = Gid::from_raw(gid);
    Ok(setresgid(gid, gid, gid)?)
}

/// Makes `uid` the user: real, effective and saved. From root, the capabilities are lost with it.
pub(crate) fn change_user(uid: u32) -> io::Result<()> {
    let uid = Uid::from_raw(uid);
    Ok(setresuid(uid, uid, uid)?)
}

/// Returns the users (real, effective, saved), likewise the groups, and the number of supplementary
/// groups.
pub(crate) fn current() -> io::Result<([u32; 3], [u32; 3], usize)> {
    let (users, groups) = (getresuid()?, getresgid()?);
    Ok((
        [users.real, users.effective, users.saved].map(Uid::as_raw),
        [groups.real, groups.effective, groups.saved].map(Gid::as_raw),
        getgroups()?.len(),
    ))
}

/// Returns whether this process can become root again.
pub(crate) fn can_become_root() -> bool {
    let keep = Uid::from_raw(KEEP);
    setresuid(keep, Uid::from_raw(0), keep).is_ok()
}
