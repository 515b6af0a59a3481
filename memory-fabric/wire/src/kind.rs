//! The kinds of frames, and their lengths.

use crate::packing::{LENGTH_BYTES, Packing, packed_bytes_max};
use crate::{
    CONTROL_BYTES_MAX, COUNT_BYTES, PAYLOAD_BYTES_MAX, PIECE_BYTES, PIECE_BYTES_MAX,
    PIECES_BYTES_MAX, PROBE_BYTES_MAX, RUN_PAGES_MAX,
};
use fabric_pages::page::PAGE_SIZE;

/// The kind of a frame.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u8)]
pub enum FrameKind {
    /// [`LeaseRequest`]: requests memory.
    Lease = 1,
    /// [`LeaseGrant`]: the answer to `Lease`.
    Granted = 2,
    /// [`Token`]: resumes a lease on a new control connection.
    Resume = 3,
    /// [`Token`]: renews a lease.
    Renew = 4,
    /// [`LeaseStatus`]: the answer to `Resume`, `Renew`, `Release` and `Delegate`.
    Status = 5,
    /// [`Token`]: ends a lease.
    Release = 6,
    /// [`AttachRequest`]: makes this a connection for pages of a lease.
    Attach = 7,
    /// No payload: the answer to `Attach`.
    Attached = 8,
    /// A message of the RDMA transport: requests RDMA access to a lease.
    Connect = 9,
    /// A message of the RDMA transport: the answer to `Connect`.
    Connected = 10,
    /// [`ComputeRequest`](crate::ComputeRequest): asks for vCPUs.
    Compute = 11,
    /// [`ComputePorts`](crate::ComputePorts): the answer to `Compute`.
    ComputePorts = 12,
    /// [`ComputeTable`](crate::ComputeTable): where the VM's compute nodes listen, once all do.
    ComputeTable = 13,
    /// [`ComputeEnd`](crate::ComputeEnd): the VM has no vCPU on the node any more.
    ComputeEnd = 14,
    /// [`ComputeLease`](crate::ComputeLease): a lease for the VM's process on the node, before
    /// `ComputeTable`.
    ComputeLease = 15,
    /// No payload: reads the page at `offset` (bytes into the lease).
    ReadPage = 16,
    /// One page: the answer to `ReadPage`.
    PageData = 17,
    /// One page: stores it at `offset`.
    WritePage = 18,
    /// No payload: the answer to `WritePage`.
    Written = 19,
    /// A number of pages, 4 bytes, from 1 to [`DROP_PAGES_MAX`]: drops those from `offset` on. The
    /// VM does not read them before it has written them again.
    DropPages = 20,
    /// No payload: the answer to `DropPages`.
    Dropped = 21,
    /// A number of pages, 4 bytes, from 1 to [`RUN_PAGES_MAX`]: reads as many from `offset` on.
    ReadPages = 22,
    /// The pages in order: the answer to `ReadPages`.
    PagesData = 23,
    /// A number of bytes, 4 bytes, from 1 to [`PROBE_BYTES_MAX`]: reads as many from `offset` on.
    /// Only on connections of [`TrafficClass::Probe`].
    Probe = 24,
    /// The bytes: the answer to `Probe`.
    ProbeData = 25,
    /// No payload: ends the RDMA connection for write-backs, if there is one. Requests behind it on
    /// its connection are executed only when no WRITE can change the lease any more.
    Fence = 26,
    /// No payload: the answer to `Fence`.
    Fenced = 27,
    /// A number of bytes, 4 bytes, a multiple of [`PIECE_BYTES`] up to [`PIECES_BYTES_MAX`]: reads as
    /// many from `offset` on, a multiple of the same.
    ReadPiece = 28,
    /// The bytes: the answer to `ReadPiece`.
    PieceData = 29,
    /// A part of a page, up to [`PIECE_BYTES_MAX`], and otherwise as for `ReadPiece`: stores it at
    /// `offset`. The answer is `Written`.
    WritePiece = 30,
    /// [`ErrorMessage`]: the request was refused; the connection ends.
    Error = 31,
    /// No payload: asks for the time stamp counter of a node that lends vCPUs.
    ReadClock = 32,
    /// [`NodeClock`](crate::NodeClock): the answer to `ReadClock`.
    Clock = 33,
    /// [`DelegateRequest`](crate::DelegateRequest): lets a process with a certificate of its own
    /// use a lease of this member.
    Delegate = 34,
    /// [`ComputeAuthority`](crate::ComputeAuthority): an authority by which the VM's process on the
    /// node knows its donors, before `ComputeTable`.
    ComputeAuthority = 35,
}

impl FrameKind {
    pub(crate) fn from_byte(byte: u8) -> Option<Self> {
        use FrameKind::*;
        let all = [
            Lease,
            Granted,
            Resume,
            Renew,
            Status,
            Release,
            Attach,
            Attached,
            Connect,
            Connected,
            Compute,
            ComputePorts,
            ComputeTable,
            ComputeEnd,
            ComputeLease,
            ReadPage,
            PageData,
            WritePage,
            Written,
            DropPages,
            Dropped,
            ReadPages,
            PagesData,
            Probe,
            ProbeData,
            Fence,
            Fenced,
            ReadPiece,
            PieceData,
            WritePiece,
            Error,
            ReadClock,
            Clock,
            Delegate,
            ComputeAuthority,
        ];
        all.into_iter().find(|&kind| kind as u8 == byte)
    }

    /// Returns whether frames of this kind have packing flags.
    pub(crate) const fn has_packing(self) -> bool {
        matches!(
            self,
            Self::ReadPage | Self::ReadPages | Self::PageData | Self::PagesData | Self::WritePage
        )
    }

    /// Returns the valid range of payload lengths in bytes, with this packing.
    #[must_use]
    pub const fn payload_bytes(self, packing: Packing) -> (usize, usize) {
        match (self, packing) {
            (Self::PageData | Self::WritePage, Packing::Zeroes | Packing::Lz4) => {
                return (LENGTH_BYTES, packed_bytes_max(1));
            }
            (Self::PagesData, Packing::Zeroes | Packing::Lz4) => {
                return (LENGTH_BYTES, packed_bytes_max(RUN_PAGES_MAX as usize));
            }
            _ => {}
        }
        match self {
            Self::PageData | Self::WritePage => (PAGE_SIZE, PAGE_SIZE),
            Self::Attached
            | Self::ReadClock
            | Self::ReadPage
            | Self::Written
            | Self::Dropped
            | Self::Fence
            | Self::Fenced => (0, 0),
            Self::DropPages | Self::ReadPages | Self::ReadPiece | Self::Probe => {
                (COUNT_BYTES, COUNT_BYTES)
            }
            Self::PieceData => (PIECE_BYTES, PIECES_BYTES_MAX),
            Self::WritePiece => (PIECE_BYTES, PIECE_BYTES_MAX),
            Self::ProbeData => (1, PROBE_BYTES_MAX as usize),
            Self::PagesData => (PAGE_SIZE, PAYLOAD_BYTES_MAX),
            _ => (0, CONTROL_BYTES_MAX),
        }
    }
}
