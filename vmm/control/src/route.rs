//! Tables of requests: methods, paths and functions.

use std::fmt;

use serde::Serialize;

use super::changes::NextChange;
use super::protocol::{Refusal, RefusalCode};

/// A supported method of HTTP. `HEAD` is `GET` without the body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// Read-only.
    Get,
    /// Performs an action.
    Post,
    /// Sets a value.
    Put,
}

impl Method {
    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Get => "GET",
            Self::Post => "POST",
            Self::Put => "PUT",
        }
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The kind of a function, which determines the thread that runs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Read-only: several run in parallel.
    Look,
    /// Changes state: one at a time.
    Change,
    /// Ends the process: runs at once, even during a change.
    End,
}

/// Content type of most bodies.
pub const JSON: &str = "application/json";

/// A successful answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Done {
    /// 200 for a completed action, 202 for a started one.
    pub status: u16,
    /// Content type of the body.
    pub content_type: &'static str,
    /// The body.
    pub body: Vec<u8>,
}

/// Result of a function.
pub type Answer = Result<Done, Refusal>;

/// Returns the change that a request waits for, from its parameters.
pub type Until<S> = fn(&S, &str) -> Result<NextChange, Refusal>;

/// A request to a subject `S`.
#[derive(Debug)]
pub struct Route<S> {
    /// The method.
    pub method: Method,
    /// The path, which begins with [`PREFIX`](super::protocol::PREFIX).
    pub path: &'static str,
    /// Kind of the function.
    pub work: Work,
    /// Status code of success.
    pub status: u16,
    /// Refusals in addition to [`RefusalCode::COMMON`].
    pub refuses: &'static [RefusalCode],
    /// Whether the request has a body.
    pub takes_body: bool,
    /// For requests that may have parameters: returns the change to wait for before the request is
    /// executed. It runs on the HTTP thread, so it must not block.
    pub until: Option<Until<S>>,
    /// Executes the request. It must not access guest memory, nor wait without a deadline.
    pub answer: fn(&S, &[u8]) -> Answer,
}

impl<S> Route<S> {
    /// Creates a read-only route.
    pub const fn look(path: &'static str, answer: fn(&S, &[u8]) -> Answer) -> Self {
        Self {
            method: Method::Get,
            path,
            work: Work::Look,
            status: 200,
            refuses: &[],
            takes_body: false,
            until: None,
            answer,
        }
    }

    /// Returns whether the route may refuse with this code.
    #[must_use]
    pub fn may_refuse(&self, code: RefusalCode) -> bool {
        RefusalCode::COMMON.contains(&code) || self.refuses.contains(&code)
    }
}

/// The subject of requests and its table.
#[derive(Debug)]
pub struct Service<S: 'static> {
    /// The subject.
    pub subject: S,
    /// The table.
    pub routes: &'static [Route<S>],
}

impl<S> Service<S> {
    /// Finds the route of a request.
    pub(super) fn find(&self, method: &str, path: &str) -> Result<&'static Route<S>, Refusal> {
        // Required by RFC 9110, section 9.3.2.
        let method = if method == "HEAD" { "GET" } else { method };
        let here = || self.routes.iter().filter(|route| route.path == path);
        if let Some(route) = here().find(|route| route.method.name() == method) {
            return Ok(route);
        }
        if here().next().is_none() {
            let text = format!("no such path; there are: {}", self.list());
            return Err(Refusal::new(RefusalCode::UnknownPath, text));
        }
        let text = format!("this path takes {}", self.methods_of(path));
        Err(Refusal::new(RefusalCode::UnknownMethod, text))
    }

    /// Returns the methods of a path, in the format of the header `Allow`.
    pub(super) fn methods_of(&self, path: &str) -> String {
        let here = self.routes.iter().filter(|route| route.path == path);
        let names: Vec<_> = here.map(|route| route.method.name()).collect();
        names.join(", ")
    }

    fn list(&self) -> String {
        let names = self
            .routes
            .iter()
            .map(|r| format!("{} {}", r.method, r.path));
        names.collect::<Vec<_>>().join(", ")
    }
}

/// Creates an answer with a JSON body.
///
/// # Errors
///
/// Fails when the body cannot be serialized.
pub fn answer(status: u16, body: &impl Serialize) -> Answer {
    match serde_json::to_vec(body) {
        Ok(body) => Ok(Done {
            status,
            content_type: JSON,
            body,
        }),
        Err(error) => Err(Refusal::new(RefusalCode::Failed, error.to_string())),
    }
}

/// Creates an answer with a text in another format.
///
/// # Errors
///
/// Never fails; the type is that of all answers.
pub fn text(content_type: &'static str, body: String) -> Answer {
    Ok(Done {
        status: 200,
        content_type,
        body: body.into_bytes(),
    })
}
