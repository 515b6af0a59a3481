//! One step of the protocol at a time, for either end.

use rustls::client::UnbufferedClientConnection;
use rustls::server::UnbufferedServerConnection;
use rustls::unbuffered::{ConnectionState, EncodeError, EncryptError, UnbufferedStatus};
use rustls::{CommonState, Error};
use std::ops::Range;

/// A buffer for records to send, and the part of it that is in use.
pub(super) type Output<'a> = (&'a mut [u8], &'a mut Range<usize>);

/// What a step came to.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Step {
    /// There may be more to do.
    Advanced,
    /// More has to be received first.
    Idle,
    /// The peer has closed its end.
    Closed,
}

/// A step that was made.
#[derive(Debug)]
pub(super) struct Advanced {
    /// Bytes of the input that are done with.
    pub(super) discard: usize,
    pub(super) step: Result<Step, Error>,
}

/// The protocol's state.
pub(super) enum Session {
    Client(Box<UnbufferedClientConnection>),
    Server(Box<UnbufferedServerConnection>),
}

/// What to do once the protocol has nothing else to do.
#[derive(Clone, Copy, Debug)]
pub(super) enum Then<'a> {
    Nothing,
    /// Encrypt these bytes.
    Send(&'a [u8]),
    /// End this direction.
    Close,
}

impl Session {
    /// Makes one step. `input` are all received records that are not done with: rustls keeps positions
    /// in them. Application data is given to `take`.
    pub(super) fn advance(
        &mut self,
        input: &mut [u8],
        output: Output<'_>,
        then: Then<'_>,
        take: &mut dyn FnMut(&[u8]),
    ) -> Advanced {
        match self {
            Self::Client(client) => advance(client.process_tls_records(input), output, then, take),
            Self::Server(server) => advance(server.process_tls_records(input), output, then, take),
        }
    }

    /// Appends what the protocol still has to send after a failure: the alert that says why.
    pub(super) fn take_output(&mut self, (buffer, used): Output<'_>) {
        // Without it rustls would look at the input again, some of which it has discarded.
        while self.common().wants_write() {
            let output = (&mut *buffer, &mut *used);
            let advanced = self.advance(&mut [], output, Then::Nothing, &mut |_| {});
            if advanced.step.is_err() {
                return;
            }
        }
    }

    /// Returns what both ends have in common.
    pub(super) fn common(&self) -> &CommonState {
        match self {
            Self::Client(client) => client,
            Self::Server(server) => server,
        }
    }
}

fn advance<Data>(
    status: UnbufferedStatus<'_, '_, Data>,
    (buffer, used): Output<'_>,
    then: Then<'_>,
    take: &mut dyn FnMut(&[u8]),
) -> Advanced {
    let discard = status.discard;
    let room = &mut buffer[used.end..];
    let general = |text: &str| Err(Error::General(text.to_owned()));
    let step = status.state.and_then(|state| match state {
        ConnectionState::ReadTraffic(mut traffic) => {
            while let Some(record) = traffic.next_record() {
                take(record?.payload);
            }
            Ok(Step::Advanced)
        }
        ConnectionState::EncodeTlsData(mut data) => match data.encode(room) {
            Ok(count) => {
                used.end += count;
                Ok(Step::Advanced)
            }
            Err(EncodeError::InsufficientSize(_) | EncodeError::AlreadyEncoded) => {
                general("the peer accepts nothing and demands answers")
            }
        },
        ConnectionState::TransmitTlsData(transmit) => {
            // It is in the output, which is sent before anything else.
            transmit.done();
            Ok(Step::Advanced)
        }
        ConnectionState::PeerClosed | ConnectionState::Closed => Ok(Step::Closed),
        // Early data is disabled.
        ConnectionState::ReadEarlyData(_) => general("unexpected early data"),
        ConnectionState::BlockedHandshake => Ok(Step::Idle),
        ConnectionState::WriteTraffic(mut traffic) => {
            let encrypted = match then {
                Then::Nothing => Ok(0),
                Then::Send(bytes) => traffic.encrypt(bytes, room),
                Then::Close => traffic.queue_close_notify(room),
            };
            match encrypted {
                Ok(count) => {
                    used.end += count;
                    Ok(Step::Idle)
                }
                Err(EncryptError::InsufficientSize(_)) => general("no room for a record"),
                Err(EncryptError::EncryptExhausted) => general("the keys are used up"),
            }
        }
        _ => general("an unknown state of TLS"),
    });
    Advanced { discard, step }
}
